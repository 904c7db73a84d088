"""How long a fresh process takes to import lowtri and to say --help. Run: python benchmarks/import_time.py

To expect on a 2-core machine: `import lowtri` under 0.2 s and `lowtri --help` under 0.3 s, the start of Python included.
"""

from __future__ import annotations

import subprocess
import sys
import time

COMMANDS = {
    "python, nothing else": "pass",
    "import lowtri": "import lowtri",
    "lowtri --help": "from lowtri.cli.main import main; main(['--help'])",
    "lowtri mask --help": "from lowtri.cli.main import main; main(['mask', '--help'])",
    "lowtri mask causal": "from lowtri.cli.main import main; main(['mask', 'causal'])",
}


def main() -> None:
    for name, code in COMMANDS.items():
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - start)
        print(f"{name:<22} {min(seconds):.3f} s")


if __name__ == "__main__":
    main()
