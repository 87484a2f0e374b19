"""`python -m kvpool.cli`, for where the script is not on the path."""

from kvpool.cli import main

main()
