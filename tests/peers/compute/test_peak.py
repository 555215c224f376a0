"""One peak for all peers of a machine: the most that any of them has seen."""

import json

import pytest
import torch

from peers.compute.peak_flops import FILE_NAME, MachinePeak

CPU = torch.device("cpu")


def peak(folder, measured, quiet=True, threads=1):
    return MachinePeak(folder, CPU, threads, lambda device: measured, lambda: quiet)


def test_peers_of_one_machine_say_the_same_whoever_measured_more(tmp_path):
    first, second, third = (peak(tmp_path, measured) for measured in (1.2e10, 3.6e10, 3.1e10))
    assert [one.know() for one in (first, second, third)] == [1.2e10, 3.6e10, 3.6e10]
    assert {one.look() for one in (first, second, third)} == {3.6e10}, "who measured less looks again"
    assert first.know() == 3.6e10, "and after a restart"


def test_a_busy_machine_is_measured_only_if_nothing_is_known_of_it(tmp_path):
    def never(device):
        raise AssertionError("others compute now")

    assert peak(tmp_path, 1e9, quiet=False).know() == 1e9
    assert MachinePeak(tmp_path, CPU, 1, never, lambda: False).know() == 1e9
    assert peak(tmp_path, 2e10).know() == 2e10, "quiet by now"


def test_what_was_done_can_be_done(tmp_path):
    slow, beside = peak(tmp_path, 2.6e9, quiet=False), peak(tmp_path, 1.0, quiet=False)
    slow.know()
    assert slow.seen(1.9e10) == 1.9e10 == slow.know()
    assert slow.seen(1.0e10) == 1.9e10
    assert beside.look() == 1.9e10


def test_other_threads_are_another_peak(tmp_path):
    peak(tmp_path, 1e10).know()
    assert peak(tmp_path, 4e10, quiet=False, threads=4).know() == 4e10


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": "y"}', "[" * 100_000, '{"x": NaN}'])
def test_a_file_that_is_no_list_of_peaks_is_made_anew(tmp_path, content):
    (tmp_path / FILE_NAME).write_text(content)
    assert peak(tmp_path, 1e10).know() == 1e10
    assert 1e10 in json.loads((tmp_path / FILE_NAME).read_text()).values()


def test_a_folder_that_nobody_may_write_to_leaves_the_peak_in_this_process(tmp_path):
    place = tmp_path / "file"
    place.write_text("no folder")
    one = peak(place, 1e10)
    assert one.know() == one.look() == 1e10
