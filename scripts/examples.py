"""Run the proof of every example, each as a process of its own with a deadline, and print one table.

    python scripts/examples.py [--quick] [--json FILE] [NAME ...]

A proof (`examples/NAME/proof.py`) runs its example end to end on this machine and writes rows and checks. Ends with code 1
when a check fails, or a proof does not come to its end in time. What a proof prints goes to `runs/examples/NAME.log`. A proof
that takes longer than DEADLINE_S says so in its folder's pyproject.toml: ``[tool.proof]`` with ``deadline_s`` and
``quick_deadline_s``, in seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

from harness import checks_text, end_in_order_on_sigterm, table, write_report  # noqa: E402  (the examples are not a package)

DEADLINE_S, QUICK_DEADLINE_S = 900.0, 600.0  # the first run of a proof builds its agent's environment
END_WITHIN_S = 40.0  # after SIGTERM: the services of a proof stop in order
LOG_TAIL = 4000


@dataclass(kw_only=True)
class Ran:
    """What one proof found. ``skipped`` says why it could not run here."""

    name: str
    seconds: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    skipped: str | None = None

    @property
    def ok(self) -> bool:
        return all(check["ok"] for check in self.checks)


def found(examples: Path = EXAMPLES) -> list[Path]:
    """All proofs, by name of the example."""
    return sorted(examples.glob("*/proof.py"))


def deadline_s(proof: Path, quick: bool) -> float:
    """Seconds that a proof may take. Raises: ValueError for one that is no positive number."""
    project = proof.with_name("pyproject.toml")
    settings = tomllib.loads(project.read_text()).get("tool", {}).get("proof", {}) if project.is_file() else {}
    name = "quick_deadline_s" if quick else "deadline_s"
    limit = settings.get(name, QUICK_DEADLINE_S if quick else DEADLINE_S)
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
        raise ValueError(f"{project}: tool.proof.{name} must be a positive number of seconds, got {limit!r}")
    return float(limit)


def run(proof: Path, folder: Path, options: Sequence[str], limit_s: float) -> Ran:
    """Run one proof; its report and its log go to ``folder``. A proof that fails is a result."""
    name = proof.parent.name
    report, log = folder / f"{name}.json", folder / f"{name}.log"
    folder.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    began_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(proof), "--json", str(report), *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            code = _wait(process, limit_s)
        finally:
            _end(process)
    ran = Ran(name=name, seconds=time.monotonic() - began_s)
    if report.exists():
        read = json.loads(report.read_text())
        ran.rows, ran.checks, ran.skipped = read["rows"], read["checks"], read.get("skipped")
    if code is None:
        why = f"still running after {limit_s:g} s"
    elif code != 0 and ran.ok:
        why = f"exit code {code}"
    elif not ran.checks and ran.skipped is None:
        why = "no report"
    else:
        return ran
    ran.checks.append({"name": "the proof runs to its end", "value": why, "target": "no error", "ok": False})
    return ran


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Its exit code, or None at the deadline."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(limit_s)
    return process.poll()


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, at which a proof stops its services in order; then by force, with all of its group."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(END_WITHIN_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", metavar="NAME", help="only these examples [default: all]")
    options.add_argument("--quick", action="store_true", help="run fewer tasks")
    options.add_argument("--here", action="store_true", help="use the current environment, if it has the packages")
    options.add_argument("--json", type=Path, metavar="FILE", help="write rows and checks to this file")
    options.add_argument(
        "--examples", type=Path, metavar="DIR", default=EXAMPLES, help="folder of the examples [%(default)s]"
    )
    options.add_argument("--logs", type=Path, metavar="DIR", default=ROOT / "runs" / "examples", help="[%(default)s]")
    given = options.parse_args(arguments)
    proofs = [p for p in found(given.examples) if not given.names or p.parent.name in given.names]
    missing = sorted(set(given.names) - {p.parent.name for p in proofs})
    if missing or not proofs:
        options.error(f"no proof of {', '.join(missing) or given.examples}; there are: {_names(found(given.examples))}")
    limits = [deadline_s(proof, given.quick) for proof in proofs]
    flags = [f"--{name}" for name in ("quick", "here") if getattr(given, name)]
    many: list[Ran] = []
    for proof, limit_s in zip(proofs, limits, strict=True):
        print(f"{proof.parent.name} ...", end=" ", flush=True)
        ran = run(proof, given.logs, flags, limit_s)
        many.append(ran)
        print(f"{'ok' if ran.ok and not ran.skipped else ran.skipped or 'FAILED'}, {ran.seconds:.0f} s", flush=True)
        if not ran.ok:
            log = given.logs / f"{ran.name}.log"
            print(f"{checks_text([c for c in ran.checks if not c['ok']])}\n{log} ends with:")
            print(log.read_text(errors="replace")[-LOG_TAIL:])
    rows = [row for ran in many for row in ran.rows or [_empty(ran)]]
    checks = [{**check, "name": f"{ran.name}: {check['name']}"} for ran in many for check in ran.checks]
    print(f"\n{table(rows)}\n\n{sum(c['ok'] for c in checks)} of {len(checks)} checks passed")
    if given.json is not None:
        write_report(given.json, rows, checks)
    return 0 if all(ran.ok for ran in many) else 1


def _empty(ran: Ran) -> dict[str, Any]:
    note = f"skipped: {ran.skipped}" if ran.skipped else "failed"
    return {"example": ran.name, "seconds": round(ran.seconds, 1), "note": note}


def _names(proofs: Sequence[Path]) -> str:
    return ", ".join(proof.parent.name for proof in proofs) or "none"


if __name__ == "__main__":
    end_in_order_on_sigterm()
    sys.exit(main())
