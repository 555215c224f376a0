"""The one string by which a person joins a run."""

import pytest
from typed import BOOTSTRAP

from peers.config.errors import UserError
from peers.config.run_url import JoinLink, join_command, parse_join_link

RUN = "ab" * 32


def test_a_link_is_read_as_it_was_written():
    link = JoinLink(RUN, (BOOTSTRAP, BOOTSTRAP.replace("31330", "31331")))
    assert parse_join_link(link.text) == link
    assert join_command(RUN, [BOOTSTRAP]) == f"swarmnet join swarmnet:{RUN}@{BOOTSTRAP}"
    assert parse_join_link("a.json") is None
    assert parse_join_link(RUN) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"swarmnet:{RUN}", "has 0; copy the whole link"),
        (f"swarmnet:{RUN}@", "has 0"),
        (f"swarmnet:{RUN[:40]}@{BOOTSTRAP}", "64 digits of the run id"),
        (f"swarmnet:{RUN.upper()}@{BOOTSTRAP}", "64 digits"),
        (f"swarmnet:{RUN}@{BOOTSTRAP[:-3]}", "was mistyped or cut"),
        (f"swarmnet:{RUN}@/ip4/203.0.113.5/tcp/31330", "does not name the peer"),
        (f"swarmnet:{RUN}@" + ",".join([BOOTSTRAP] * 9), "has 9"),
    ],
)
def test_a_link_that_was_cut_is_refused_with_what_to_do(text, words):
    with pytest.raises(UserError, match=words) as refused:
        parse_join_link(text)
    assert "copy" in str(refused.value)
