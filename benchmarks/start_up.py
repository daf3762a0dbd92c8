"""How fast `latfit --help` answers, beside `python -c "import typer"`, which no Typer program can beat. Aim: 1.5."""

import subprocess
import sys

from benchmarks.timing import paired


def main(smoke: bool = False) -> None:
    """Print the paired times."""

    def run(*arguments: str) -> None:
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)

    pairs = 3 if smoke else 25
    result = paired(lambda: run("-m", "latfit", "--help"), lambda: run("-c", "import typer"), pairs)
    print(f"start-up: latfit --help against import typer: {result}")


if __name__ == "__main__":
    main()
