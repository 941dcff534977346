from __future__ import annotations

from agentcore_rl_toolkit.cli.doctor.template import examine


def test_every_family_passes_its_self_test(family, renderer):
    report = examine(renderer)
    assert report.parser == family.parser
    assert report.ok, str(report)
    failed_or_skipped = {check.name for check in report.checks if check.ok is None}
    assert failed_or_skipped <= {"parser round trip, reasoning"}, str(report)
