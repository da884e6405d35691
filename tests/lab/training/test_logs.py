"""Progress where no bar can be drawn: a line now and then, with the time that is left."""

from __future__ import annotations

from blockgate.lab.training.logs import LINE_SECONDS, Lines, RunLog


def test_a_line_every_few_seconds_with_the_time_left():
    now, said = [100.0], []
    lines = Lines("epoch 1/2, batches", 1000, done=200, say=said.append, clock=lambda: now[0])
    for done in range(200, 1001):
        lines.update(done)
        now[0] += LINE_SECONDS / 80
    assert len(said) == 10
    # 80 batches in 10 seconds: 720 take 90.
    assert said[0] == "epoch 1/2, batches: 280 of 1000, about 90 seconds left"
    assert said[-1] == "epoch 1/2, batches: 1000 of 1000, about 0 seconds left"


def test_a_long_epoch_has_fewer_lines():
    now, said = [0.0], []
    lines = Lines("epoch 1/2, batches", 36_000, say=said.append, clock=lambda: now[0])
    for done in range(36_001):  # ten hours
        lines.update(done)
        now[0] += 1.0
    assert 50 < len(said) < 150


def test_a_run_without_a_terminal_prints_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("blockgate.lab.training.logs.LINE_SECONDS", 0.0)
    log = RunLog(tmp_path, first_update=0)
    log.begin_epoch(1, 2, 0, 5)
    log.advance(3)
    log.close()
    assert "epoch 1/2, batches: 3 of 5, about" in capsys.readouterr().err
