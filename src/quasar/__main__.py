"""``python -m quasar``."""

from quasar.commands.cli import main

main()
