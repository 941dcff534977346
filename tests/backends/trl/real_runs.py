"""Run by test_real_trl.py in an environment that has TRL: all cases in one process, because importing TRL is most of their work.

Writes what was found to the JSON file named on the command line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import vllm_stand_in

out = Path(sys.argv[1])
vllm_stand_in.install(out.parent / "packages")

import replay_run  # noqa: E402  # loads TRL, which looks for vLLM when it is imported
import vllm_run  # noqa: E402

torch.set_num_threads(1)
found = replay_run.cases(out.parent)
out.write_text(json.dumps({**found, "vllm": vllm_run.cases(out.parent)}))
