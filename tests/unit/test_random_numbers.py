import pickle
import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np

from yolofleet.support.random_numbers import ReusedGenerator, generator, permutation

FIRST = [0.8887762532386165, 0.32790998279012107, 0.697887642535896]
ORDER = [1, 4, 7, 2, 8, 5, 6, 9, 0, 3]


def test_equal_keys_draw_equal_numbers_in_any_order_and_process():
    here = generator(3, "augment", 1, 20).random(4)
    generator(3, "augment", 1, 21).random(1000)
    assert np.array_equal(here, generator(3, "augment", 1, 20).random(4))
    code = "from yolofleet.support.random_numbers import generator; print(generator(3, 'augment', 1, 20).random(4).tolist())"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert there.strip() == str(here.tolist())


def test_every_part_of_the_key_matters():
    keys: list[tuple[Any, ...]] = [
        (3, "augment", 1, 20),
        (4, "augment", 1, 20),
        (3, "order", 1, 20),
        (3, "augment", 2, 20),
    ]
    keys += [(3, "augment", 1, 21), (3, "augment", 1), (3, "augment", 12, 0), (3, "augment", 1, 20, 0)]
    assert len({generator(*key).random() for key in keys}) == len(keys)


def test_numpy_integers_make_the_same_key_as_python_integers():
    assert generator(np.int64(3), "order", np.int32(1)).random() == generator(3, "order", 1).random()


def test_numbers_stay_as_they_were_in_the_first_release():
    # A change here would silently change every run of every user: resumed runs would repeat and skip samples.
    assert generator(0, "augment", 0, 0).random(3).tolist() == FIRST
    assert permutation(0, 0, 10).tolist() == ORDER


def test_permutation_visits_every_sample_once_and_differs_by_epoch():
    first, second = permutation(0, 0, 1000), permutation(0, 1, 1000)
    assert first.dtype == np.int32  # every loader process keeps two
    assert sorted(first) == list(range(1000))
    assert (first == second).mean() < 0.02
    assert permutation(0, 0, 1).tolist() == [0] and permutation(0, 0, 0).tolist() == []


def test_a_long_permutation_is_sorted_in_ranges_and_as_a_whole_the_same():
    length = 3 * 2**18 + 1
    whole = np.argsort(generator(7, "order", 2).random(length), kind="stable")
    assert np.array_equal(permutation(7, 2, length), whole)


def test_a_long_permutation_takes_little_memory_beside_the_result():
    length = 1 << 20
    tracemalloc.start()
    permutation(0, 0, length)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 14 * length  # 4 bytes each for the result; sorting all at once takes 20 more


def test_a_reused_generator_begins_again_with_each_key():
    reused = ReusedGenerator()
    for key in ((0, "augment", 1, 2), (7, "augment", 0, 0), (0, "augment", 1, 2)):
        drawn = reused.restart(*key).random(11)
        assert np.array_equal(drawn, generator(*key).random(11))
        reused.restart(*key).random(3)  # begins again in the middle of a block of words
        assert np.array_equal(reused.restart(*key).random(11), drawn)


def test_a_reused_generator_works_in_a_process_that_got_it_as_bytes():
    reused = pickle.loads(pickle.dumps(ReusedGenerator()))
    for position in (1, 2):
        drawn = reused.restart(0, "augment", 1, position).random(5)
        assert np.array_equal(drawn, generator(0, "augment", 1, position).random(5))
