"""How row ranges are handed to Petastorm's worker pools."""

import threading

import pytest

pytest.importorskip(
    "petastorm", reason="not installable beside today's PyArrow", exc_type=ImportError
)

from hvd_estimators.data.readers.petastorm import _RangeVentilator

pytestmark = pytest.mark.timeout(60)


class Ventilator(_RangeVentilator):
    """Asks for three row ranges; the pool is the test."""

    def __init__(self, in_flight, on_item):
        items = [{"sequence": index} for index in range(3)]
        super().__init__(lambda **item: on_item(item), iter(items), in_flight)


def test_reading_is_not_over_before_the_last_range_has_been_processed():
    """Pools ask this when they are out of work, and stop if so: a range too early or too late."""
    over = []

    def process_at_once(item):
        over.append(ventilator.completed())
        ventilator.processed_item()
        over.append(ventilator.completed())

    ventilator = Ventilator(1, process_at_once)
    ventilator.start()
    ventilator._thread.join(10)

    assert over == [False, False, False, False, False, True]


def test_reading_runs_ahead_by_a_bounded_number_of_ranges():
    items = []
    both = threading.Event()

    def note(item):
        items.append(item["sequence"])
        if len(items) == 2:
            both.set()

    ventilator = Ventilator(2, note)
    ventilator.start()
    assert both.wait(10)
    ventilator._thread.join(0.1)
    assert items == [0, 1]

    ventilator.processed_item()
    ventilator._thread.join(10)
    assert items == [0, 1, 2]
    assert not ventilator.completed()
