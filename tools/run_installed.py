"""run_installed.py MODULE: `python -m MODULE` from the checkout, with the late_interaction that is installed.

`python -m` would import the checkout's late_interaction, which has no compiled libraries unless it was
built in place.
"""

import runpy
import sys
from pathlib import Path

sys.path = [*sys.path[1:], str(Path(__file__).resolve().parent.parent)]  # last: what is installed comes first
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
