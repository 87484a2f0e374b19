"""Accounts of requests, as they are kept."""

from kvpool.router.explain import Account, Accounts


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
