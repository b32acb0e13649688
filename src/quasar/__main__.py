"""``python -m quasar``."""

from quasar.cli import main

main()
