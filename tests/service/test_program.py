"""The program that shows a departure can be read: each sequence stands in it once, and what was dropped does not."""

from paritygate.service.journal import Journal


def test_a_sequence_is_named_once() -> None:
    journal = Journal()
    one, two = "datum([5, 6], [6, 7], weights=[1, 0.5])", "datum([5, 6], [[6, 7], [7, 6]])"
    with journal.check():
        journal.add("t1 = wait(service.create_lora_training_client(MODEL, rank=8))")
        journal.add(f"o2 = wait(t1.forward([{one}, {two}], 'cross_entropy'))")
        journal.add(f"o3 = wait(t1.forward_backward([{one}], 'cross_entropy'))")
        lines = journal.program("http://127.0.0.1:8000", "tiny", "it is off").splitlines()
    assert lines[0] == "# it is off"
    assert lines[-8:] == [
        f"d1 = {one}",
        f"d2 = {two}",
        "",
        "t1 = wait(service.create_lora_training_client(MODEL, rank=8))",
        "o2 = wait(t1.forward([d1, d2], 'cross_entropy'))",
        "o3 = wait(t1.forward_backward([d1], 'cross_entropy'))",
        "print('o2: loss:sum', o2.metrics.get('loss:sum'), 'logprobs', logprobs(o2))",
        "print('o3: loss:sum', o3.metrics.get('loss:sum'), 'logprobs', logprobs(o3))",
    ]
    compile("\n".join(lines), "program", "exec")
