from lightning_pipeoffload.schedule.placement import loop, stages_on, v


def test_loop_goes_round():
    assert loop(3, 2) == (0, 1, 2, 0, 1, 2)


def test_v_goes_down_and_back_up():
    assert v(3) == (0, 1, 2, 2, 1, 0)
    assert v(2, 3) == (0, 1, 1, 0, 0, 1)


def test_one_rank_holds_every_stage():
    assert loop(1, 3) == v(1, 3) == (0, 0, 0)


def test_stages_on_a_rank_are_in_model_order():
    assert stages_on(loop(4, 2), 1) == [1, 5]
    assert stages_on(v(4), 0) == [0, 7]
