"""Who is next, so that nobody waits behind one client's many samples. No torch."""

from collections import Counter, OrderedDict
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What the queue needs to know of an item."""

    @property
    def client(self) -> str:
        """Whose it is."""


Item = TypeVar("Item", bound=Waiting)


class FairQueue(Generic[Item]):
    """Each free place goes to the waiting client with the fewest samples running.

    Among equals it goes to the one that got a place the longest time ago (max-min fairness over
    places, round robin within); a client's own items keep their order. To take out an item takes as
    long with thousands of others as alone, so items must be hashable.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, OrderedDict[Item, None]] = OrderedDict()
        """By client; the client that got a place last comes last."""
        self._num_running: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def push(self, item: Item) -> None:
        """Put an item behind the others of its client."""
        self._waiting.setdefault(item.client, OrderedDict())[item] = None

    def num_of(self, client: str) -> int:
        """How many items of a client wait."""
        return len(self._waiting.get(client, ()))

    def can_pop(self, most: int) -> bool:
        """Whether something waits whose client has fewer than `most` running."""
        return any(self._num_running[client] < most for client in self._waiting)

    def pop(self) -> Item:
        """Take the next item, which counts as running until it is released. IndexError if empty."""
        if not self._waiting:
            raise IndexError("nothing waits")
        client = min(self._waiting, key=lambda client: self._num_running[client])
        items = self._waiting[client]
        item, _ = items.popitem(last=False)
        self._num_running[client] += 1
        self._waiting.move_to_end(client)
        if not items:
            del self._waiting[client]
        return item

    def remove(self, item: Item) -> bool:
        """Take out an item; False if it does not wait."""
        items = self._waiting.get(item.client)
        if items is None or item not in items:
            return False
        del items[item]
        if not items:
            del self._waiting[item.client]
        return True

    def release(self, item: Item) -> None:
        """An item that was popped runs no more."""
        self._num_running[item.client] -= 1
        if not self._num_running[item.client]:
            del self._num_running[item.client]

    def clear(self) -> list[Item]:
        """Take out everything that waits."""
        items = [item for waiting in self._waiting.values() for item in waiting]
        self._waiting.clear()
        return items
