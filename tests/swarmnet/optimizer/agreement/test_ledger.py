"""The agreement ledger: newcomers, peers that miss rounds, liars that were honest, and its place in the
state."""

import numpy as np
from method_cases import correlated_votes

from swarmnet.identifiers import PeerId
from swarmnet.model.state_layout import LEDGER_FIELDS, LEDGER_ROWS
from swarmnet.optimizer.agreement.comparison import FULL_WEIGHT
from swarmnet.optimizer.agreement.ledger import LAG, PROBATION_ROUNDS, AgreementLedger
from swarmnet.optimizer.agreement.weight_report import (
    NEWCOMER,
    RECENT_ROUNDS,
    REPORT_INTERVAL,
    open_report,
    short_tag,
)
from swarmnet.rounds.result_table import tag_key, tag_of

PEERS = [PeerId(f"peer {number:03}") for number in range(12)]


def read(numbers):
    ledger = AgreementLedger()
    ledger.load(numbers)
    return ledger


class Story:
    """Rounds of a group, told to a ledger that is written and read again after each round."""

    def __init__(self):
        self.ledger = AgreementLedger()
        self.round = 0

    def play(self, honest, liars=(), rounds=1):
        for _ in range(rounds):
            contributors = [*honest, *liars]
            signs_CN, _ = correlated_votes(len(contributors), seed=self.round)
            signs_CN[len(honest) :] *= -1
            order = np.argsort(contributors)
            tags = [tag_of(contributors[i]) for i in order]
            self.ledger.record(self.round, tags, self.ledger.compare(tags, signs_CN[order]))
            votes = self.ledger.votes
            self.ledger = read(self.ledger.numbers())
            assert self.ledger.votes == votes
            self.round += 1
        return self

    def weights(self, peers, ahead=LAG):
        return self.ledger.weights(ahead, [tag_of(peer) for peer in peers])


def test_all_weigh_the_same_while_nobody_is_known():
    story = Story()
    for _ in range(PROBATION_ROUNDS):
        assert story.weights(PEERS) == [FULL_WEIGHT] * 12
        story.play(PEERS[:8], PEERS[8:])
    assert story.weights(PEERS) == [FULL_WEIGHT] * 8 + [0] * 4


def test_the_next_rounds_are_weighed_by_the_ledger_of_some_rounds_before():
    story = Story().play(PEERS[:8], PEERS[8:], rounds=PROBATION_ROUNDS)
    for ahead in range(1, LAG):
        assert story.weights(PEERS, ahead) == [FULL_WEIGHT] * 12
    assert story.weights(PEERS, LAG) == story.weights(PEERS, LAG + 9) == [FULL_WEIGHT] * 8 + [0] * 4
    later = story.weights(PEERS, 2)
    story.play(PEERS)
    assert story.weights(PEERS, 1) == later, "a weight is final once its round is at most LAG ahead"


def test_groups_of_less_than_five_weigh_the_same():
    story = Story().play(PEERS[:4], rounds=9)
    assert not story.ledger.numbers().any()
    assert story.weights(PEERS[:4]) == [FULL_WEIGHT] * 4


def test_a_newcomer_counts_after_its_probation():
    story = Story().play(PEERS[:8], rounds=9)
    for _ in range(PROBATION_ROUNDS):
        assert story.weights(PEERS[:9]) == [FULL_WEIGHT] * 8 + [0]
        assert story.ledger.votes == {tag_key(tag_of(peer)): True for peer in PEERS[:8]}
        story.play(PEERS[:9])
    assert story.weights(PEERS[:9]) == [FULL_WEIGHT] * 9
    assert story.ledger.votes == {tag_key(tag_of(peer)): True for peer in PEERS[:9]}


def test_who_misses_rounds_keeps_its_weight():
    story = Story().play(PEERS[:8], PEERS[8:], rounds=9)
    story.play(PEERS[1:7], rounds=40)
    assert story.weights(PEERS) == [FULL_WEIGHT] * 8 + [0] * 4


def test_who_lies_after_honest_rounds_loses_its_weight_within_a_few_rounds():
    story = Story().play(PEERS, rounds=30)
    assert story.weights(PEERS) == [FULL_WEIGHT] * 12
    story.play(PEERS[:8], PEERS[8:], rounds=3)
    assert story.weights(PEERS) == [FULL_WEIGHT] * 8 + [0] * 4
    story.play(PEERS, rounds=3)
    assert story.weights(PEERS[8:] + PEERS[:8])[:4] == [0] * 4, "trust comes back slowly"
    story.play(PEERS, rounds=20)
    assert story.weights(PEERS) == [FULL_WEIGHT] * 12


def test_more_keys_than_rows_push_nobody_out_who_contributes():
    story = Story().play(PEERS, rounds=9)
    for crowd in range(3):
        strangers = [PeerId(f"stranger {crowd} {number}") for number in range(LEDGER_ROWS - 300)]
        story.play(PEERS, strangers)
    assert story.weights(PEERS) == [FULL_WEIGHT] * 12
    assert story.ledger.numbers().reshape(LEDGER_ROWS, LEDGER_FIELDS)[:, :4].any(1).all()


def test_any_numbers_can_be_read():
    generator = np.random.default_rng(0)
    ledger = read(generator.integers(-(2**31), 2**31, LEDGER_ROWS * LEDGER_FIELDS).astype(np.int32))
    signs_CN, _ = correlated_votes(12)
    tags = [tag_of(peer) for peer in PEERS]
    ledger.record(1 << 30, tags, ledger.compare(tags, signs_CN))
    assert all(0 <= weight <= FULL_WEIGHT for weight in ledger.weights(3, tags))


def test_half_that_lies_takes_no_weight_from_all_for_ever():
    """The two halves are alike, so that chance decides. When the lies end, all weigh the same again."""
    story = Story().play(PEERS[:6], PEERS[6:], rounds=40)
    story.play(PEERS, rounds=60)
    assert story.weights(PEERS) == [FULL_WEIGHT] * 12


def test_weights_are_reported_at_some_rounds_newcomers_as_such_and_old_contributors_not():
    ledger = AgreementLedger()
    tags = sorted(map(tag_of, PEERS))

    def play(rounds, tags):
        for number in rounds:
            signs_CN, _ = correlated_votes(len(tags), seed=number)
            ledger.record(number, tags, ledger.compare(tags, signs_CN))

    play(range(REPORT_INTERVAL - 1), tags[:8])
    assert ledger.report == b""
    play([REPORT_INTERVAL - 1], tags[:9])
    found = open_report(ledger.report)
    names = [short_tag(tag_key(tag)) for tag in tags]
    assert found.round == REPORT_INTERVAL - 1
    assert found.marks == {**dict.fromkeys(names[:8], FULL_WEIGHT), names[8]: NEWCOMER}
    play(range(REPORT_INTERVAL, REPORT_INTERVAL + RECENT_ROUNDS), tags[:8])
    assert set(open_report(ledger.report).marks) == set(names[:8])


def test_while_all_count_in_full_a_report_names_nobody():
    ledger, tags = AgreementLedger(), sorted(map(tag_of, PEERS[:4]))
    for number in range(REPORT_INTERVAL):
        signs_CN, _ = correlated_votes(len(tags), seed=number)
        ledger.record(number, tags, ledger.compare(tags, signs_CN))
    assert open_report(ledger.report).marks == {}
