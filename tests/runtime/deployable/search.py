"""An agent that looks for planted secrets in all that its session can read, by itself and with a program."""

import glob
import json
import os
import re
import subprocess
from pathlib import Path

from bedrock_agentcore.runtime import BedrockAgentCoreApp

app = BedrockAgentCoreApp()
SECRET = re.compile(b"plante" + b"d-secret-[a-z-]+")  # the whole word would find itself
HERE = Path(__file__).resolve().parent
AT_IMPORT = (HERE / "train.jsonl").read_bytes() if (HERE / "train.jsonl").exists() else b""


def found_in(paths):
    found = set(SECRET.findall(AT_IMPORT))
    for path in paths:
        try:
            found.update(SECRET.findall(Path(path).read_bytes()))
        except OSError:
            continue
    return {secret.decode() for secret in found}


@app.entrypoint
def main(payload):
    walked = [os.path.join(base, name) for top in payload["tops"] for base, _, names in os.walk(top) for name in names]
    seen = glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline")
    # Root reads files of all through the root of the process that made its sandbox.
    roots = glob.glob("/proc/[0-9]*/root") if os.geteuid() else []
    outside = [f"{root}{top}/train.jsonl" for root in roots for top in payload["tops"]]
    grep = ["grep", "-rhoaE", "plante" + "d-secret-[a-z-]+", *payload["tops"]]
    printed = subprocess.run(grep, capture_output=True, check=False, text=True).stdout
    return {
        "found": sorted(found_in([*walked, *seen, *outside]) | set(printed.split())),
        "own": json.loads(Path("own.json").read_text()),
        "read": {path: Path(path).read_text() for path in payload.get("read", ()) if os.path.exists(path)},
    }


if __name__ == "__main__":
    app.run()
