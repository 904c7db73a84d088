"""Python imports this file when it starts with this folder in PYTHONPATH: processes that tests start know the emulation of AMX."""

import amx_emulated  # noqa: F401
