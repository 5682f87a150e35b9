"""Ports are claimed before the server binds them."""

import socket

from miles.engine import lease_port


def test_two_claims_never_get_the_same_port_though_nobody_listens_yet():
    a, b = lease_port(35500), lease_port(35500)
    assert a.port != b.port
    port = a.port
    a.release()
    c = lease_port(35500)
    assert c.port == port
    b.release()
    c.release()


def test_a_port_somebody_listens_on_is_skipped():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        taken = s.getsockname()[1]
        lease = lease_port(taken)
        assert lease.port > taken
        lease.release()
