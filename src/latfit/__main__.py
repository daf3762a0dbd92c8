"""`latfit`, and `python -m latfit`. Nothing is imported before Ctrl-C ends quietly."""

import sys

INTERRUPTED = 130


def main() -> None:
    try:
        from latfit.cli.app import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
