"""How sessions are kept from this user's files: the tiers, and what each of them needs."""
