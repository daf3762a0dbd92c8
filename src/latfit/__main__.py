"""`python -m latfit`."""

from latfit.cli.app import main

if __name__ == "__main__":
    main()
