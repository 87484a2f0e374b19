"""Accounts of requests, as they are kept."""

from kvpool.router.records.explain import Account, Accounts


def test_accounts_are_each_tenants_and_so_many() -> None:
    accounts = Accounts(3)
    made = [Account(ident, "m", tenant, 0.0) for tenant, ident in ("ax", "bx", "ay", "ax", "cz")]
    for account in made[:4]:
        accounts.add(account)
    assert [accounts.get("x", "a"), accounts.get("x", "b")] == [made[3], made[1]]
    assert [accounts.get("x"), accounts.get("y")] == [made[3], made[2]]
    accounts.add(made[4])
    assert [accounts.get("x", "b"), accounts.get("x")] == [None, made[3]]
    accounts.add(Account("w", "m", "a", 0.0))
    accounts.add(Account("v", "m", "a", 0.0))
    assert [accounts.get("x"), accounts.get("x", "a"), accounts.get("y")] == [None] * 3


def test_a_tenant_does_not_see_which_others_had_a_part_in_its_miss() -> None:
    account = Account("x", "m", "a", 0.0)
    assert "missing" not in account.plain("a")
    why = {"reason": "full", "by": "abcd", "where": "n", "differs": {"model": ["a", "b"]}}
    account.facts["missing"] = why
    assert account.plain()["missing"] == why
    shown = account.plain("a")["missing"]
    assert shown == {"reason": "full", "by": "", "where": "", "differs": None}
    account.facts["missing"] = {"error": "no answer"}
    assert account.plain("a")["missing"] == {"error": "no answer"}
