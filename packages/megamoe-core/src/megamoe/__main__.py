"""`python -m megamoe`, for environments without the console script."""

from megamoe.cli import main

if __name__ == "__main__":
    main()
