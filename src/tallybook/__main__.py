"""`python -m tallybook` is `tallybook`."""

from tallybook._cli import main

if __name__ == "__main__":
    main()
