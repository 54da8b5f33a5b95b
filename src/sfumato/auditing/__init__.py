"""What attacks on a mechanism show: lower bounds on epsilon, beside the upper bound of a certificate.

An audit plays many games. In each a fair coin decides whether an example takes part, and an attacker
who does not see the coin gives a score. `bounds.py` turns scores and coins into lower bounds, whoever
made them; `power.py` says what so many games could have shown at best. `canary.py` plays the games
against the product's own step, as an adversary who sees every update.
"""
