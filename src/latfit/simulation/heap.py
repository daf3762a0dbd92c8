"""Requests in a heap, in compiled code: the least key first, of equal keys the lower number.

A heap is an array of numbers of requests; counts[place] of its places are used, key[r] belongs to request r.
"""

from latfit.compiled import inner, rare
from latfit.stats import FloatArray, IntArray


@inner
def _before(key: FloatArray, a: int, b: int) -> bool:
    return bool(key[a] < key[b] or (key[a] == key[b] and a < b))


@rare
def push(heap: IntArray, counts: IntArray, place: int, key: FloatArray, r: int) -> None:
    at = counts[place]
    counts[place] += 1
    while at > 0 and _before(key, r, heap[(at - 1) // 2]):
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = r


@rare
def pop(heap: IntArray, counts: IntArray, place: int, key: FloatArray) -> int:
    counts[place] -= 1
    at, size = 0, counts[place]
    first, r = heap[0], heap[size]
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and _before(key, heap[child + 1], heap[child]):
            child += 1
        if _before(key, r, heap[child]):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = r
    return int(first)
