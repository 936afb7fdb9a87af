"""`python -m shared` is the `dflash` command, for places where the script folder is not on PATH."""

from shared.cli import main

if __name__ == "__main__":
    main()
