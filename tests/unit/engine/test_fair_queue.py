import random
from dataclasses import dataclass

import pytest

from blockdraft.engine.fair_queue import FairQueue


@dataclass(eq=False)
class Item:
    client: str
    number: int = 0


def filled(*clients):
    queue = FairQueue()
    for number, client in enumerate(clients):
        queue.push(Item(client, number))
    return queue


def order(queue):
    return "".join(queue.pop().client for _ in range(len(queue)))


def test_clients_take_turns_and_keep_their_own_order():
    queue = filled(*"aaaaabbc")
    items = [queue.pop() for _ in range(len(queue))]
    assert "".join(item.client for item in items) == "abcabaaa"
    assert [item.number for item in items if item.client == "a"] == [0, 1, 2, 3, 4]


def test_a_free_place_goes_to_whoever_has_fewest():
    queue = filled(*"aaa")
    running = [queue.pop() for _ in range(3)]
    for _ in range(3):
        queue.push(Item("a"))
    queue.push(Item("b"))
    queue.release(running[0])
    assert queue.pop().client == "b"
    queue.release(running[1])
    queue.push(Item("b"))
    assert order(queue) == "abaa"  # one each is running, and b got its place later


def test_removed_items_are_not_served():
    queue, gone = filled(*"ab"), Item("a")
    queue.push(gone)
    assert queue.remove(gone)
    assert not queue.remove(gone)
    assert not queue.remove(Item("z"))
    assert order(queue) == "ab"
    with pytest.raises(IndexError):
        queue.pop()


def test_nothing_is_remembered_of_clients_that_left():
    queue, draw = FairQueue(), random.Random(0)
    running = []
    for number in range(500):
        queue.push(Item(f"client{number}"))
        if draw.random() < 0.5:
            running.append(queue.pop())
    assert len(queue.clear()) + len(running) == 500
    for item in running:
        queue.release(item)
    assert not queue._num_running
    assert not queue._waiting


def test_no_client_ever_runs_two_more_than_one_that_waits():
    """Max-min fairness: whoever waits had as many places as anybody, give or take one."""
    queue, draw = FairQueue(), random.Random(1)
    running = []
    for _ in range(2000):
        for _ in range(draw.randrange(3)):
            queue.push(Item(draw.choice("aaaaaabc")))
        while len(queue) and len(running) < 6:
            before = {c: sum(i.client == c for i in running) for c in "abc"}
            waiting = set(queue._waiting)
            item = queue.pop()
            assert before[item.client] == min(before[c] for c in waiting)
            running.append(item)
        if running:
            queue.release(running.pop(draw.randrange(len(running))))


class Compared:
    """An item that counts how often others are compared with it."""

    client, num = "a", 0

    def __eq__(self, other):
        Compared.num += 1
        return self is other

    __hash__ = object.__hash__


def test_to_take_out_an_item_looks_at_no_others():
    queue, items = FairQueue(), [Compared() for _ in range(1000)]
    for item in items:
        queue.push(item)
    assert not queue.remove(Compared())
    assert all(queue.remove(item) for item in reversed(items[1:]))
    assert queue.pop() is items[0]
    assert Compared.num < 100
