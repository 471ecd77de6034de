"""``python -m bench decentralized``: decentralized Adam beside All-Reduce."""
