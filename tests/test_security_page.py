"""Every sentence of docs/security.md has a test that would fail if it were false, or a reason why there is none.

`BACKED` maps the beginning of each sentence to the names of its tests. A new sentence needs an entry here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rdzv.engines.embedded import server_core, turns
from rdzv.engines.embedded.frames import FRAME_MAX, PAGE_BYTES, PAGE_RUNS
from rdzv.engines.embedded.limits import COMPLAINT_S, Limits
from rdzv.engines.embedded.run import ABANDONED_S
from rdzv.web import actions, app, feed, observer, serving

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "security.md").read_text()
NAMES = {name for file in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())}

ADVICE = "advice, an explanation or the beginning of a list: nothing that a test could find false"
OTHERS = "a statement about another program"
FIGURES = "test_the_figures_of_the_page_are_those_of_the_server"
HTTP_FIGURES = "test_the_figures_of_the_page_are_those_of_the_http_port"
ATTACKS = "test_an_attack_is_hardly_noticed_by_others"

BACKED = {
    "Any client that the server of a run accepts": "test_with_the_same_secret_everything_works_as_without",
    "By default the server accepts every client": "test_without_a_secret_where_others_can_reach_it_there_is_one_warning",
    "This is fine on one machine": ADVICE,
    "If other machines can reach the port": "test_without_a_secret_where_others_can_reach_it_there_is_one_warning",
    "Two measures restrict access": ADVICE,
    "A shared secret takes a minute": ADVICE,
    "Without TLS, an attacker who can read": "test_nothing_but_the_handshake_can_be_overheard",
    "An attacker who can change packets": ADVICE,
    "If such attackers are on your network": ADVICE,
    "These measures do *not* protect": ADVICE,
    "Every node needs the same secret": "test_a_refusal_says_the_same_at_both_ends_and_is_final",
    "Give it in one of three ways": "test_the_secret_is_found_in_each_of_the_three_places",
    "`token=` in Python": "test_the_secret_is_found_in_each_of_the_three_places",
    "It is not allowed on a command line": "test_the_shell_tools_take_secret_and_certificates_and_children_do_not_see_it",
    "`--conf token=...` is refused": "test_the_shell_tools_take_secret_and_certificates_and_children_do_not_see_it",
    "`token_file=`, or `--token-file`": "test_the_shell_tools_take_secret_and_certificates_and_children_do_not_see_it",
    "The file may have up to 4,096 bytes": "test_a_secret_as_large_as_allowed_is_taken_with_its_newline",
    "If every user of the machine can read": "test_what_everybody_can_read_or_guess_is_warned_about_once",
    "`RDZV_TOKEN` in the environment": "test_the_secret_is_found_in_each_of_the_three_places",
    "rdzv removes it from the environment": "test_the_environment_is_clean_once_a_member_was_made",
    "Until then the variable is visible": ADVICE,
    "A member's own settings": "test_what_is_said_to_a_member_counts_more_than_its_environment",
    "Giving both `token` and `token_file`": "test_what_is_said_to_a_member_counts_more_than_its_environment",
    "rdzv warns about a secret": "test_what_everybody_can_read_or_guess_is_warned_about_once",
    "It estimates how many bits": "test_a_secret_that_is_short_regular_or_of_words_can_be_guessed_however_long_it_is",
    "Only the embedded server and a quorum": """
        test_secrets_and_tls_are_refused_where_the_engine_knows_none test_a_secret_lets_members_in_and_keeps_strangers_out""",
    "`file://`, `c10d://` and `memory://` know": "test_secrets_and_tls_are_refused_where_the_engine_knows_none",
    "The sentinel of an agent on etcd": "test_with_tls_and_a_password_the_sentinel_knows_them_by_its_pipe_only",
    "The secret is never sent": """
        test_the_secret_is_never_on_the_wire_nor_in_a_log test_the_secret_is_in_nothing_that_is_shown_or_stored""",
    "Both sides prove that they know it": "test_a_server_that_cannot_prove_itself_is_not_believed",
    "A proof is the HMAC-SHA256": "test_a_proof_is_for_the_two_numbers_the_role_and_the_version",
    "`rdzv 2` (the protocol's version)": "test_a_proof_is_for_the_two_numbers_the_role_and_the_version",
    "Recorded proofs are worthless": "test_a_recorded_handshake_proves_nothing_a_second_time",
    "A proof sent back to its sender": "test_a_proof_sent_back_to_where_it_came_from_proves_nothing",
    "A man in the middle": "test_a_proof_is_bound_to_the_servers_certificate",
    "(For that reason a proxy": "test_a_proof_is_bound_to_the_servers_certificate",
    "The handshake costs one round trip": "test_a_secret_costs_one_round_trip_and_no_secret_none",
    "The key of the HMAC": "test_a_guess_costs_time_and_memory_and_a_process_pays_once",
    "A process does that once": "test_a_guess_costs_time_and_memory_and_a_process_pays_once",
    "An attacker who has recorded a handshake": "test_a_guess_costs_time_and_memory_and_a_process_pays_once",
    "The salt is the same everywhere": "test_with_the_same_secret_everything_works_as_without",
    "The driver sends its proof first": "test_a_stranger_hears_a_random_number_and_the_sentence_and_nothing_else",
    "With its proof it sends its hello": "test_the_run_is_named_only_after_the_server_asked_for_proof",
    "TLS prevents both": "test_nothing_but_the_handshake_can_be_overheard",
    "One `rdzv serve` is one domain of trust": "test_with_the_same_secret_everything_works_as_without",
    "Give jobs that do not trust each other": ADVICE,
    "All files are ordinary PEM files": "test_files_that_cannot_be_used_are_named",
    "TLS 1.2 is the oldest version": "test_both_versions_of_tls_that_are_allowed_work_and_nothing_older",
    "The server's certificate must match": """
        test_each_refusal_has_its_sentence_at_both_ends test_a_name_can_be_given_that_the_certificate_is_for""",
    "You can use one certificate": "test_the_certificates_that_the_documentation_makes_are_good_for_both_sides",
    "rdzv reads the files again": "test_certificates_that_were_renewed_are_used_without_a_restart",
    "To make an authority": "test_the_certificates_that_the_documentation_makes_are_good_for_both_sides",
    "Use elliptic curves": ADVICE,
    "Even with elliptic curves": ADVICE,
    "**Slurm.** Create the secret": ADVICE,
    "In the scripts of [contrib/slurm]": ADVICE,
    "For torchrun the option is": "test_every_setting_can_be_given_but_those_with_an_option_of_their_own_and_the_secret",
    "**Kubernetes.** [The manifests]": "test_a_pod_names_only_what_exists",
    "Where the platform leaves only variables": "test_a_train_job_of_kubeflow_needs_no_endpoint",
    "You can use a `kubernetes.io/tls` secret": OTHERS,
    "The certificate must have the name": "test_each_refusal_has_its_sentence_at_both_ends",
    "Metrics and the page": "test_without_http_there_is_no_port",
    "Then everybody who reaches the port": "test_runs_are_told_as_json",
    "rdzv logs a warning if other machines": "test_where_others_reach_the_port_there_are_warnings",
    "Bind it to `127.0.0.1`": ADVICE,
    "The page changes nothing unless": "test_an_action_is_refused_unless_actions_are_allowed",
    "Then each action needs the secret": """
        test_an_action_without_the_secret_is_refused_and_each_guess_takes_time test_the_secret_is_not_taken_from_a_url""",
    "The browser keeps it in the memory": """
        test_an_action_on_the_page_needs_the_secret test_the_page_needs_no_outside_resource_and_makes_no_html_of_text""",
    "A wrong secret is answered after": f"""
        test_an_action_without_the_secret_is_refused_and_each_guess_takes_time {HTTP_FIGURES}""",
    "The members and the journal are told who asked": """
        test_drain_ban_unban_and_close_are_carried_out_and_the_journal_says_who_asked""",
    "If the server has a certificate, `rdzv serve --http`": "test_with_a_certificate_the_port_speaks_https_only",
    "`rdzv dashboard` speaks plain HTTP": ADVICE,
    "Without TLS the secret for actions": "test_where_others_reach_the_port_there_are_warnings",
    "A page of another site can neither": """
        test_a_request_of_another_site_is_refused_even_with_the_secret test_a_request_under_a_foreign_name_is_refused""",
    "Requests for a name that is not": "test_a_request_under_a_foreign_name_is_refused",
    "An action must be JSON": "test_a_request_of_another_site_is_refused_even_with_the_secret",
    "Texts of members are shown as text": "test_text_of_members_is_never_taken_for_html",
    "The policy `default-src 'self'`": """
        test_every_answer_has_the_headers_of_safety test_the_page_needs_no_outside_resource_and_makes_no_html_of_text""",
    "Strangers can take little": f"""
        test_so_many_connections_are_kept_and_the_next_is_closed test_so_many_browsers_may_listen_and_no_more
        test_headers_and_bodies_are_bounded {HTTP_FIGURES}""",
    "With TLS, connections count": f"test_connections_in_the_tls_handshake_count_and_have_little_time {HTTP_FIGURES}",
    "A connection must send its request": f"""
        test_a_connection_that_says_nothing_or_half_a_request_is_closed test_a_browser_that_does_not_read_is_dropped
        {HTTP_FIGURES}""",
    "At most 500 runs are watched": f"test_at_most_so_many_runs_are_watched {HTTP_FIGURES}",
    "The text of the metrics is made": f"test_many_scrapes_cost_little_more_than_one {HTTP_FIGURES}",
    "A client that has the secret can list": "test_only_holders_of_the_secret_are_told_which_runs_there_are",
    "The list has the names of runs": "test_a_server_lists_its_runs_page_by_page_and_none_of_them_notices",
    "A page of it has at most 250 runs": f"test_a_page_of_runs_is_bounded_in_bytes_and_in_work {FIGURES}",
    "No run is opened, read or kept alive": "test_a_server_lists_its_runs_page_by_page_and_none_of_them_notices",
    "A client without the secret sees": "test_a_stranger_hears_a_random_number_and_the_sentence_and_nothing_else",
    "An HTTP client is told": "test_a_web_browser_is_told_where_it_is",
    "It learns no run": """
        test_a_hello_without_proof_is_told_nothing_even_as_a_probe
        test_a_stopping_server_does_not_tell_strangers_where_it_is""",
    "It may send 4 KiB": """
        test_a_stranger_may_send_little_and_stays_no_longer_for_talking test_the_words_of_a_stranger_do_not_prolong_its_time""",
    "When the server has reached its connection limit": f"""
        test_strangers_do_not_keep_members_out_by_their_number
        test_a_crowd_of_strangers_is_bounded_and_the_oldest_is_dropped {FIGURES}""",
    "The server accepts 32 connections": f"test_a_few_connections_are_accepted_in_each_turn {FIGURES} {ATTACKS}",
    "It logs refusals": f"test_all_peers_together_fill_one_line_of_the_log_in_a_second {FIGURES}",
    "A client in one run can harm that run only": ATTACKS,
    "Under every attack": ATTACKS,
    "These are the bounds": ADVICE,
    "The server's time is counted in steps": """
        test_a_run_that_is_alone_goes_on_in_the_next_turn
        test_requests_of_a_run_that_used_its_share_wait_and_are_answered_in_order""",
    "A transaction may have 25,000 operations": f"""
        test_a_transaction_has_so_many_parts_and_no_more
        test_a_transaction_that_looks_at_too_many_keys_is_refused_and_the_next_is_served {FIGURES}""",
    "A run may spend 200,000 steps": f"""
        test_requests_of_a_run_that_used_its_share_wait_and_are_answered_in_order {FIGURES}""",
    "While several runs compete": f"""
        test_runs_that_compete_are_served_one_by_one_with_as_much_time_for_the_others {FIGURES} {ATTACKS}""",
    "An answer of more than 16 MiB": f"test_an_answer_larger_than_a_frame_is_refused_with_a_sentence {FIGURES}",
    "The server adds up what a transaction reads": """
        test_a_small_request_with_a_huge_answer_is_refused_before_it_is_encoded""",
    "One run may have all connections": "test_one_run_leaves_connections_to_the_others",
    "One host may have": "test_one_host_leaves_connections_to_the_others",
    "All runs together may take 512 MiB": f"""
        test_all_runs_together_are_bounded_and_each_has_its_share
        test_small_keys_leases_and_watches_are_counted_too {FIGURES} {ATTACKS}""",
    "One half is for all runs": "test_all_runs_together_are_bounded_and_each_has_its_share",
    "A run may have 256 MiB": f"""
        test_a_run_has_room_for_so_many_bytes test_a_run_has_room_for_so_many_keys_and_a_full_one_can_still_be_changed
        test_there_are_so_many_leases_and_no_more
        test_the_watches_of_one_run_are_limited_and_a_client_that_goes_makes_room {FIGURES}""",
    "Its own records are let in": f"""
        test_a_full_store_leaves_room_for_the_records_of_its_run test_a_run_whose_store_is_full_forms_again
        test_a_watch_of_keys_alone_is_refused_by_itself_before_there_is_no_room_for_those_of_members {FIGURES}""",
    "A server may have 10,000 runs": f"test_there_are_so_many_runs_and_no_more {FIGURES}",
    "If there is no room for a new one": f"""
        test_a_host_that_opened_all_runs_makes_room_for_those_of_others
        test_a_host_that_took_all_memory_makes_room_for_the_runs_of_others {ATTACKS}""",
    "A run without clients is forgotten with its keys": f"""
        test_a_run_that_everybody_left_is_forgotten_though_keys_without_a_lease_are_left
        test_runs_are_forgotten_sooner_when_room_is_short
        test_a_run_with_leases_is_forgotten_sooner_when_room_is_short {FIGURES}""",
    "Members that come back to it": "test_what_the_server_forgot_is_told_again_and_nobody_is_disturbed",
    "A large value is kept once": """
        test_a_large_value_is_not_copied_for_each_watch_and_watches_that_are_not_read_are_cut_off""",
    "All clients together are owed": f"test_all_that_is_unread_is_counted_and_the_run_that_leaves_most_pays {FIGURES}",
    "Above that, the worst clients": "test_all_that_is_unread_is_counted_and_the_run_that_leaves_most_pays",
    "A client that does not read is owed": f"""
        test_a_slow_watcher_is_cut_off_with_a_gap_and_never_grows_the_server
        test_a_client_whose_buffer_fills_while_it_is_told_of_gaps_is_held_back_again {FIGURES}""",
    "Its next requests wait": "test_requests_of_one_that_does_not_read_wait_until_it_does",
    "It is dropped after 30 s": f"test_one_that_never_reads_again_is_closed {FIGURES}",
    "A connection that ended frees its memory": "test_a_connection_that_ended_needs_no_garbage_collector",
    "Every client that a server accepts can write": """
        test_texts_of_a_hostile_member_are_shown_without_escapes_wherever_they_appear
        test_what_a_server_says_is_printable_wherever_it_ends""",
    "rdzv takes terminal escapes": """
        test_no_reader_gets_a_text_that_is_not_printable_or_too_long test_what_a_server_says_is_printable_wherever_it_ends""",
    "So terminals, logs, errors": "test_texts_of_a_hostile_member_are_shown_without_escapes_wherever_they_appear",
    "There is one exception": "test_info_is_what_its_program_wrote",
    "`info` is for programs": "test_info_is_what_its_program_wrote",
    "A record that is not rdzv's": "test_garbage_disables_neither_status_nor_drain_nor_run",
    "One member's record": "test_garbage_disables_neither_status_nor_drain_nor_run",
    "A drain request or a ban counts": """
        test_a_drain_request_that_is_garbage_is_one_without_a_reason test_a_ban_that_is_garbage_is_a_ban""",
    "A head that cannot be read": """
        test_holders_are_evicted_and_form_the_next_round_with_a_higher_fence test_a_head_that_is_garbage_is_shown_and_closed""",
    "`rdzv close` closes such a run": "test_an_operator_closes_it test_a_head_that_is_garbage_is_shown_and_closed",
    "Settings that cannot be read": """
        test_a_leader_replaces_settings_that_somebody_has_overwritten
        test_settings_that_are_garbage_are_shown_and_replaced_by_the_first_who_comes""",
    "Both sides say why": "test_each_refusal_has_its_sentence_at_both_ends",
    "A member that joins for the first time": """
        test_who_comes_with_a_wrong_secret_is_told_at_once_and_shows_no_secret""",
    "A member that has already joined": "test_who_has_been_in_goes_on_through_a_server_with_another_secret",
}


def sentences() -> list[str]:
    """Return the sentences of the page, without code, tables and headings."""
    prose = re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    found = []
    for block in re.split(r"\n\s*\n|\n(?=- |\d\. )", prose):
        lines = [line.strip() for line in block.splitlines() if line and not line.startswith(("#", "|", "<!--"))]
        text = re.sub(r"^(- |\d\. )", "", " ".join(lines))
        found += re.split(r"(?<=[.:?!)])\s+(?=[A-Z*(`]|rdzv )", text) if text else []
    return found


@pytest.mark.parametrize("sentence", sentences())
def test_the_sentence_is_backed(sentence):
    entries = [tests for start, tests in BACKED.items() if sentence.startswith(start)]
    assert entries, f"no test is named for {sentence!r}: add one to BACKED"
    for tests in entries:
        missing = set(tests.split()) - NAMES if tests not in (ADVICE, OTHERS) else set()
        assert not missing, f"{sentence!r} names tests that do not exist: {missing}"


def test_every_entry_is_about_a_sentence_of_the_page():
    assert [start for start in BACKED if not any(sentence.startswith(start) for sentence in sentences())] == []


def test_the_figures_of_the_page_are_those_of_the_server():
    limits, mib = Limits(), 1024 * 1024
    words = " ".join(PAGE.split())
    for figure in (
        f"or {limits.strangers:,} clients have not said hello",
        f"accepts {limits.accepts} connections per turn",
        f"at most one line per {'second' if COMPLAINT_S == 1.0 else COMPLAINT_S} in total",
        f"may have {limits.operations:,} operations and take {limits.steps:,} steps to look at keys",
        f"A run may spend {limits.turn:,} steps",
        f"a run may spend {limits.turn // 4:,}, and runs",
        f"at most {turns.PAUSE_MAX_S} s.",
        f"An answer of more than {FRAME_MAX // mib} MiB is refused",
        f"(of those above {server_core.SMALL})",
        f"All runs together may take {limits.stored // mib} MiB",
        (f"A run may have {limits.bytes // mib} MiB, {limits.keys:,} keys, {limits.leases:,} leases and "
        f"{limits.run_targets:,} watched keys"),
        f"A server may have {limits.runs:,} runs",
        f"are owed at most {limits.unread // mib} MiB",
        f"owed at most {limits.unanswered // mib} MiB and the news of its watches, {limits.backlog // mib} MiB",
        f"dropped after {limits.slow_s:g} s",
        f"has {limits.greeting_s:g} s in total",
        f"has at most {PAGE_RUNS} runs and {PAGE_BYTES // 1024} KiB",
    ):
        assert figure in words
    assert (ABANDONED_S, server_core.EMPTY_S, server_core.FORGOTTEN_S) == (3600, 60, 7 * 86_400)


def test_the_figures_of_the_page_are_those_of_the_http_port():
    words = " ".join(PAGE.split())
    for figure in (
        f"{serving.CONNECTIONS_MAX} connections, of which {feed.CLIENTS_MAX} may listen for changes",
        f"{app.HEADERS_MAX // 1024} KiB of headers and {actions.BODY_MAX // 1024} KiB of a body",
        f"send its request within {serving.REQUEST_S:g} s, and a browser that has not read for {serving.STUCK_S:g} s",
        f"At most {observer.RUNS_MAX} runs are watched",
    ):
        assert figure in words
    assert (actions.GUESS_S, app.METRICS_S) == (1.0, 0.5)
