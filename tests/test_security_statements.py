"""Each numbered statement of docs/security.md has tests. Those of the sandbox run as this user and as an ordinary one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = {
    1: ["runtime/api/test_signatures.py::test_boto3_with_the_right_keys_gets_in"],
    2: ["runtime/http/test_commands.py::test_each_stream_has_its_own_characters"],
    3: [
        "isolation/test_sandbox.py::test_only_what_is_named_is_there_and_only_what_is_writable_changes",
        "isolation/test_sandbox.py::test_nothing_of_a_process_outside_can_be_read",
        "isolation/test_view.py::test_two_sessions_write_the_same_files_and_each_reads_its_own",
        "runtime/sessions/test_hidden.py::test_a_session_finds_no_answer_and_has_its_own_data",
    ],
    4: [
        "cli/test_agents_as_they_are.py::test_an_agent_sees_no_reference_scorer_key_or_file_of_another_session",
        "runtime/sessions/test_views.py::test_a_session_finds_no_folder_log_or_socket_of_another_session",
    ],
    5: [
        "runtime/test_credentials.py::test_a_variable_may_be_named_without_its_value",
        "runtime/sessions/test_table.py::test_sessions_share_no_files_environment_or_random_numbers",
    ],
    6: ["app/test_proofs.py::test_a_record_that_the_session_did_not_write_is_replaced"],
    7: ["isolation/test_tiers.py::test_without_bubblewrap_the_default_is_none_with_the_reason_and_process_is_refused"],
    8: ["runtime/containers/test_node.py::test_each_session_is_a_container_of_its_own"],
    9: [
        "test_servers.py::test_a_foreign_origin_is_refused_whatever_is_asked",
        "test_servers.py::test_a_runtime_is_used_with_its_key_only",
        "runtime/api/test_signatures.py::test_what_aws_does_not_show_is_guarded_too",
    ],
    10: [
        "runtime/sessions/test_endings.py::test_graceful_stop_leaves_nothing_and_exits_0",
        "runtime/sessions/test_table.py::test_session_that_ignores_sigterm_is_killed_with_all_it_started",
    ],
}


def test_every_statement_has_tests_and_each_of_them_exists() -> None:
    page = (ROOT / "docs/security.md").read_text().partition("\n## ")[0]
    assert [int(number) for number in re.findall(r"^(\d+)\. ", page, re.MULTILINE)] == list(TESTS)
    missing = []
    for file, _, name in (test.partition("::") for tests in TESTS.values() for test in tests):
        if f"def {name}(" not in (ROOT / "tests" / file).read_text():
            missing.append(f"{file}::{name}")
    assert missing == []
