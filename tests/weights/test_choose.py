import pytest

from miles.config import load_config
from miles.weights.choose import choose, ways

ALL = ("disk", "broadcast", "p2p")


@pytest.mark.parametrize(("figures", "way", "decided"), [
    ([], "disk", False),
    ([("disk", 3.0)], "disk", False),
    ([("disk", 3.0), ("disk", 2.0)], "broadcast", False),
    ([("disk", 3.0), ("disk", 2.0), ("broadcast", None)], "p2p", False),  # a way that failed is not tried again
    ([("disk", 3.0), ("disk", 2.0), ("broadcast", None), ("p2p", 9.0), ("p2p", 1.5)], "p2p", True),  # the first one made the connections
    ([("disk", 3.0), ("disk", 2.0), ("broadcast", 4.0), ("broadcast", 2.0), ("p2p", 9.0), ("p2p", 2.5)], "disk", True),
    ([("disk", None), ("broadcast", None), ("p2p", None)], "disk", True),
])
def test_each_way_is_tried_twice_and_the_fastest_kept(figures, way, decided):
    assert choose(ALL, figures) == (way, decided)


def test_a_run_that_names_its_way_has_no_choice():
    assert choose(("p2p",), []) == ("p2p", True)
    assert ways(load_config("configs/tiny_async.toml", ("weights.transport=broadcast",))) == ("broadcast",)
    assert ways(load_config("configs/tiny_async.toml", ("weights.transport=auto",))) == ALL


def test_quantized_weights_do_not_go_point_to_point():
    assert ways(load_config("configs/glm52_async.toml", ("weights.transport=auto",))) == ("disk", "broadcast")
