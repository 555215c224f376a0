"""Every code that the program uses is in the list of reasons, and the other way round; so are the docs."""

import ast
from functools import cache
from types import SimpleNamespace

import msgspec
import pytest
from one_of_each import one_of_each
from syntax import MODULES, ROOT, nodes_of, tree_of

from peers.telemetry import event_page, log_events, notices
from peers.telemetry.event import event_text
from peers.telemetry.event_fold import PeerTimeline
from peers.telemetry.event_log import LogLine, parse
from peers.telemetry.log_events import EVENT_CLASSES, TextNotice
from peers.telemetry.metrics import declared_metrics
from peers.telemetry.notices import QUIET_SECONDS, NoticePrinter
from peers.telemetry.reasons import TABLES

LISTED = {code for table in TABLES for code in table}
WHERE = {
    "ComputeError": 0, "_unlink": 1, "part_from": 1, "refused": 1, "_refused": 1, "Refuse": 0, "SendNack": 3,
    "Nack": 2, "NackArrived": 3, "_reroute": 1, "_abandon": 1, "Failed": 1, "Declined": 2, "Fault": 1,
    "Dropped": 1, "Withdraw": 0, "_rest": 1, "NotArchived": 0, "_refusal": 0,
}  # fmt: skip
"""Calls of which one argument is a code, and which; an unpacked argument counts as one."""
QUOTED = {"peers/telemetry/reasons.py", "peers/telemetry/metrics.py"}
"""Where codes are listed or translated, not used."""


def literals(node, constants):
    """The strings that an expression can be, as far as they stand in the source."""
    if isinstance(node, ast.Constant):
        return {node.value} if isinstance(node.value, str) else set()
    if isinstance(node, ast.IfExp):
        return literals(node.body, constants) | literals(node.orelse, constants)
    if isinstance(node, ast.BoolOp):
        return set().union(*(literals(value, constants) for value in node.values))
    if isinstance(node, ast.Name):
        return constants.get(node.id, set())
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        inner = literals(node.args[1], constants) if len(node.args) > 1 else set()
        return inner | {value for one in (node.func.value,) if isinstance(one, ast.Name)
                        for value in constants.get(one.id, set())}  # fmt: skip
    return set()


def constants_of(nodes):
    """Names that stand for strings here: constants, values of tables, and variables given a literal."""
    found = {}
    for node in nodes:
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                if isinstance(name, ast.Name):
                    for one in value.values if isinstance(value, ast.Dict) else [value]:
                        found.setdefault(name.id, set()).update(literals(one, {}))
    return found


def scopes(path):
    """(assignments and calls, the variables of the place) of every function, and of what is outside."""
    found = nodes_of(path)
    functions = [*found.get(ast.FunctionDef, ()), *found.get(ast.AsyncFunctionDef, ())]
    outside = constants_of(tree_of(path).body)
    bodies = [tree_of(path).body, *(node.body for node in found.get(ast.ClassDef, ()))]
    yield [node for body in bodies for node in body if isinstance(node, ast.Assign)], outside
    for function in functions:
        nodes = [node for node in ast.walk(function) if isinstance(node, ast.Assign | ast.Call)]
        yield nodes, {**outside, **constants_of(nodes)}


@cache
def used_codes():
    """Code -> where it is used: (file:line, the kind of event or None)."""
    shared = constants_of(tree_of(ROOT / "swarmnet/inference/inference_client.py").body)
    used = {}
    for path in MODULES:
        name = str(path.relative_to(ROOT))
        if name in QUOTED:
            continue
        for nodes, constants in scopes(path):
            known = {**shared, **constants}
            for node in nodes:
                for code in codes_at(node, known) - {""}:
                    used.setdefault(code, []).append((f"{name}:{node.lineno}", event_of(node)))
    return used


def codes_at(node, constants):
    if isinstance(node, ast.Assign):  # `code = ...`, also of a class of errors
        named = any(isinstance(target, ast.Name) and target.id == "code" for target in node.targets)
        return literals(node.value, constants) if named else set()
    return codes_of_call(node, constants) if isinstance(node, ast.Call) else set()


def event_of(node):
    """The kind of event that is made here, or None."""
    made = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    module, _, kind = made.partition(".")
    return getattr(log_events, kind, None) if module == "log_events" else None


def codes_of_call(call, constants):
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    found = set()
    for keyword in call.keywords:
        if keyword.arg == "code":
            found |= literals(keyword.value, constants)
    position = WHERE.get(called)
    if called in ("refused", "_refused") and len(call.args) < 3:
        position = None  # Of the directory's gate, which gives its reasons in words.
    if position is not None and position < len(call.args):
        found |= literals(call.args[position], constants)
    return found


def test_every_code_that_is_used_is_listed():
    assert {code: places[0][0] for code, places in used_codes().items() if code not in LISTED} == {}


def test_every_event_with_a_code_has_a_table_that_lists_it():
    wrong = [
        (place, event, code)
        for code, places in used_codes().items()
        for place, event in places
        if event and code not in (event.codes or ())
    ]
    assert wrong == []


def test_every_listed_code_is_used():
    strings = {
        node.value
        for path in MODULES
        if str(path.relative_to(ROOT)) not in QUOTED
        for node in nodes_of(path).get(ast.Constant, ())
        if isinstance(node.value, str)
    }
    assert LISTED - strings == {"other"} - strings


def test_the_search_would_find_a_new_code():
    tree = ast.parse(
        "note(log_events.X(code='new' if a else 'newer'))\nself._unlink(peer, NEW)\nNEW = 'newest'"
    )
    found = [codes_at(node, constants_of(tree.body)) for node in ast.walk(tree)]
    assert set().union(*found) == {"new", "newer", "newest"}


def test_each_code_has_a_meaning_and_what_helps():
    for table in TABLES:
        for code, reason in table.items():
            assert code.replace("_", "").isalpha(), code
            assert reason.meaning, code
            assert reason.cure, code
            assert not reason.meaning.endswith("."), code


def test_the_metrics_that_tables_name_exist_and_have_all_codes_as_labels():
    declared = {metric.name.removeprefix("swarmnet_"): metric for metric in declared_metrics()}
    for table in TABLES:
        if table.metric and declared[table.metric].labels:
            (label,) = (label for label in declared[table.metric].labels if label.name != "stage")
            assert set(table) <= set(label.values), table.title


def test_the_page_lists_them_all():
    page = (ROOT / "docs" / "watching.md").read_text()
    assert page.endswith("## Codes\n\n" + event_page.codes()), "run scripts/docs"


# -- and in words -------------------------------------------------------------------------------------------


def test_every_event_with_a_code_has_a_sentence_and_every_field_that_it_names():
    for event in one_of_each():
        codes = event.codes or {}
        assert ("code" in event.fields) == bool(codes), event.name
        for code, reason in codes.items():
            words = event_text(msgspec.structs.replace(event, code=code))
            assert (words.code if words else "none") == (code if reason.level != "none" else "none")
    assert {table.title for table in TABLES} >= {
        kind.codes.title for kind in EVENT_CLASSES.values() if kind.codes
    }


def test_every_event_is_followed_and_told_without_a_fault():
    story, teller = PeerTimeline(), NoticePrinter(SimpleNamespace(notify=lambda *_, **__: None))
    for event in [*one_of_each(), TextNotice("goes to 2 MB", "line"), TextNotice("paused", "order")]:
        story.take(LogLine(1e9, 0.0, event))
        teller.on_line(LogLine(1e9, 0.0, event))
    assert [one.text for one in story.events][-2:] == ["goes to 2 MB", "paused"]


def test_events_are_told_with_what_happened_why_and_what_helps():
    words = event_text(log_events.Unlinked("12D3KooWabcdef", "silent"))
    assert words.text == "...abcdef is gone: it sent nothing for 4 seconds"
    assert words.level == "warning"
    assert "swarmnet doctor" in words.cure
    assert event_text(log_events.Waiting("stage_missing", [1, 2])).text.startswith("waits for stages 1, 2:")
    assert event_text(log_events.WaitingOver()).text == "all stages have peers again"
    assert event_text(log_events.Unlinked("12D3KooWabcdef", "of a newer version")) is None
    assert event_text(parse("unlinked", {"code": "left"})) is None, "no event of this version"
    assert event_text(parse("committed", {"code": "silent"})) is None


class Said:
    def __init__(self):
        self.lines = []

    def notify(self, event, text, level="info", **fields):
        self.lines.append((event, text, level, fields))


def heard(events):
    said = Said()
    teller = NoticePrinter(said)
    for at, name, fields in events:
        teller.on_line(LogLine(1e9 + at, at, parse(name, fields)))
    return said.lines


def test_a_report_tells_trouble_once_and_how_often_it_came_since():
    refusal = {"peer": "12D3KooWabcdef", "code": "malformed"}
    lines = heard([(float(second), "refused", refusal) for second in range(40)])
    assert [line[0] for line in lines] == ["refused", "refused"]
    assert lines[0][1].startswith("refused ...abcdef: bytes that no honest peer sends (")
    assert lines[1][1].endswith(f"({QUIET_SECONDS - 1:.0f} more since it was last shown)")
    assert lines[0][3] == {"code": "malformed"}


def test_a_report_tells_each_peer_and_nothing_that_is_everyday():
    events = [
        (1.0, "unlinked", {"peer": "12D3KooWabcdef", "code": "left"}),
        (1.0, "unlinked", {"peer": "12D3KooWabcdeg", "code": "silent"}),
        (1.0, "unlinked", {"peer": "12D3KooWabcdeh", "code": "released"}),
        (1.0, "applied", {"round": 3, "code": "completed"}),
        (1.0, "applied", {"round": 4, "code": "alone"}),
        (1.0, "committed", {"tokens": 5}),
    ]
    assert [line[1].partition(":")[0] for line in heard(events)] == [
        "...abcdef is gone", "...abcdeg is gone", "a round was applied"
    ]  # fmt: skip


def test_one_peer_per_stage_is_said_once_and_again_only_after_somebody_was_there():
    rounds = [(60.0 * round, "applied", {"round": round, "code": "alone"}) for round in range(20)]
    assert len(heard(rounds)) == 1
    there = (1200.0, "applied", {"round": 20, "code": "completed"})
    gone = (1260.0, "applied", {"round": 21, "code": "alone"})
    assert len(heard([*rounds, there, gone])) == 2


def test_strangers_cannot_fill_the_memory_of_what_was_said():
    said = Said()
    teller = NoticePrinter(said)
    for number in range(2000):
        teller.on_line(LogLine(0.0, 0.0, log_events.Refused(f"12D3KooW{number:06}", "malformed")))
    assert len(teller._shown_at) <= notices.MAX_REMEMBERED
    assert len(teller._suppressed) <= notices.MAX_REMEMBERED


@pytest.mark.parametrize("text", ["a\x1b[2J", "b\nc"])
def test_a_reason_that_a_stranger_wrote_is_not_what_is_told(text):
    assert text not in event_text(log_events.RefusedBy(text, "other", text)).text or len(text) < 12
