collect_ignore_glob = ["*_code.py"]  # read by type checkers, never run
