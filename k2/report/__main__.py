"""python -m k2.report"""

from pathlib import Path

from k2.report import write

print(write(Path(".")))
