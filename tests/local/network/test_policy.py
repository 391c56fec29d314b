"""What the rules let out, by values alone."""

from __future__ import annotations

from ipaddress import IPv4Address

import pytest

from managed_e2b.local.errors import ApiError
from managed_e2b.local.network.policy import OPEN, Policy, parse

ALL = "0.0.0.0/0"
PRIVATE = ["10.0.0.5", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "224.0.0.1", "255.255.255.255"]
PRIVATE += ["168.63.129.16", "192.0.0.192"]  # what clouds tell their machines
NEVER = ["127.0.0.1", "127.9.9.9", "0.0.0.0", "0.1.2.3"]


def permits(policy: Policy, address: str) -> bool:
    return policy.permits(IPv4Address(address))


@pytest.mark.parametrize("address", PRIVATE + NEVER)
def test_what_is_private_is_out_of_reach_by_default_and_when_everything_is_allowed(address):
    assert not permits(OPEN, address)
    assert not permits(parse(True, [ALL]), address)
    assert not permits(parse(True, ["8.0.0.0/5", "64.0.0.0/2", "128.0.0.0/1"]), address)


@pytest.mark.parametrize("address", PRIVATE)
def test_a_rule_that_names_it_opens_it(address):
    assert permits(parse(None, [address]), address)
    assert permits(parse(None, [address], [ALL]), address)
    assert permits(parse(None, ["10.0.0.0/8"]), "10.1.2.3")
    assert not permits(parse(None, ["8.0.0.0/6"]), "10.1.2.3")  # a network that holds public ones too


@pytest.mark.parametrize("address", NEVER)
def test_no_rule_opens_the_loopback(address):
    for rule in (address, "127.0.0.0/8", "0.1.2.3"):
        try:
            policy = parse(None, [rule])
        except ApiError:
            continue  # 0.0.0.0
        assert not permits(policy, address)


def test_allowed_beats_denied_and_neither_is_allowed():
    policy = parse(None, ["203.0.113.7"], ["203.0.113.0/24"])
    assert permits(policy, "203.0.113.7")
    assert not permits(policy, "203.0.113.8")
    assert permits(policy, "198.51.100.1")
    # also where what is denied is the smaller one
    assert permits(parse(None, ["203.0.113.0/24"], ["203.0.113.7"]), "203.0.113.7")


def test_no_internet_is_everything_denied():
    assert not permits(parse(False), "203.0.113.7")
    assert permits(parse(False, ["203.0.113.7"]), "203.0.113.7")
    assert not parse(False).permits_dns(IPv4Address("8.8.8.8"))
    assert permits(parse(True), "203.0.113.7")


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("example.com", "example.com", True),
        ("example.com", "EXAMPLE.com.", True),
        ("Example.com", "example.com", True),
        ("example.com", "a.example.com", False),
        ("example.com", "notexample.com", False),
        ("*.example.com", "a.example.com", True),
        ("*.example.com", "a.b.example.com", True),
        ("*.example.com", "example.com", False),
        ("*.example.com", ".example.com", False),
        ("*.example.com", "badexample.com", False),
        ("*.example.com", "example.com.evil.org", False),
        ("*", "anything", True),
        ("*", "", False),
    ],
)
def test_names(pattern, name, fits):
    assert parse(None, [pattern], [ALL]).permits_name(name) is fits


def test_names_open_the_dns_servers_and_nothing_else():
    default = parse(None, ["example.com"], [ALL])
    assert default.permits_dns(IPv4Address("8.8.8.8"))
    assert not default.permits_dns(IPv4Address("1.1.1.1"))
    assert not permits(default, "8.8.8.8")
    own = parse(None, ["example.com"], [ALL], ["1.1.1.1"])
    assert own.permits_dns(IPv4Address("1.1.1.1"))
    assert not own.permits_dns(IPv4Address("8.8.8.8"))
    assert not parse(None, ["example.com"], [ALL], []).permits_dns(IPv4Address("8.8.8.8"))
    assert not parse(None, ["203.0.113.7"], [ALL], ["1.1.1.1"]).permits_dns(IPv4Address("1.1.1.1"))  # no names


def test_what_a_dns_server_may_be_asked():
    host, other = IPv4Address("8.8.8.8"), IPv4Address("1.1.1.1")
    assert OPEN.permits_question(host, "x.org")
    assert not OPEN.permits_question(host, None)  # it is the host's own, which may do more for the host
    assert OPEN.permits_question(other, None)
    names = parse(None, ["*.example.com"], [ALL])
    assert names.permits_question(host, "x.example.com")
    assert not names.permits_question(host, "x.org")
    assert not names.permits_question(host, None)
    assert not names.permits_question(other, "x.example.com")
    assert not parse(False).permits_question(host, "x.org")
    assert parse(None, ["*"], [ALL]).permits_question(host, "x.org")


@pytest.mark.parametrize(
    ("allow", "deny", "servers", "words"),
    [
        (["example.com"], [], None, "you must include 'ALL_TRAFFIC' in deny out"),
        (["example.com"], ["1.0.0.0/8", "128.0.0.0/1"], None, "you must include 'ALL_TRAFFIC'"),
        ([], ["example.com"], None, "invalid denied CIDR example.com"),
        ([], ["0.0.0.0"], None, "invalid denied CIDR"),
        ([], ["0.0.0.0/8"], None, "invalid denied CIDR"),
        ([], ["1.2.3.4/33"], None, "invalid denied CIDR"),
        (["0.0.0.0"], [], None, "invalid allowed address"),
        (["::"], [], None, "invalid allowed address"),
        (["exa mple.com"], [ALL], None, "invalid allowed address"),
        (["*.*.com"], [ALL], None, "invalid allowed address"),
        (["http://example.com"], [ALL], None, "invalid allowed address"),
        ([""], [ALL], None, "invalid allowed address"),
        (["1.2.3.4/33"], [ALL], None, "invalid allowed address"),
        ([], [], ["dns.example"], "dnsServers must be IPv4"),
        ([], [], ["::1"], "dnsServers must be IPv4"),
        ([], [], ["127.0.0.53"], "must not be loopback"),
        ([], [], [f"1.1.1.{n}" for n in range(11)], "at most 10"),
    ],
)
def test_what_is_refused(allow, deny, servers, words):
    with pytest.raises(ApiError, match=words.replace("(", r"\(")) as refused:
        parse(None, allow, deny, servers)
    assert refused.value.status == 400


def test_ipv6_is_understood_and_has_no_effect():
    policy = parse(None, ["2001:db8::1"], ["2001:db8::/32"])
    assert (policy.allowed, policy.denied) == ((), ())
    assert permits(policy, "203.0.113.7")
