"""What attacks on a mechanism show: lower bounds on epsilon, beside the upper bound of a certificate.

An audit plays many games. In each a fair coin decides whether an example takes part, and an attacker
who does not see the coin gives a score. `bounds` turns scores and coins into lower bounds, whoever
made them; `rates` says what so many games could have shown at best, `sfumato.accounting.attacker` what
the claimed mechanism allows.

Three attacks: `canary` against the product's own step, as an adversary who sees every update; `membership`
against trained models (`toy_task`, `parallel_models`); `one_run` against one ordinary run. `arguments` checks
what an audit is asked and given, `page` draws it.
"""
