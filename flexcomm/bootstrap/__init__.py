"""How the ranks of a job find, join and compare each other, and what happens when one of them fails."""
