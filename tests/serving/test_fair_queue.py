"""The queue takes one job of each client in turn."""

from clover_jax.serving.scheduler import FairQueue


def queue_of(*clients):
    queue = FairQueue()
    for number, client in enumerate(clients):
        queue.push(client, number)
    return queue


def drained(queue):
    return [queue.pop() for _ in range(len(queue))]


def test_a_client_with_many_jobs_does_not_go_before_the_others():
    assert drained(queue_of("a", "a", "a", "b", "c", "b")) == [0, 3, 4, 1, 5, 2]


def test_a_job_that_is_withdrawn_is_never_taken():
    queue = queue_of("a", "b", "a")
    queue.discard("a", 0)
    queue.discard("b", 1)
    queue.discard("b", 1)  # a second time it is not there
    assert list(queue) == drained(queue) == [2]
