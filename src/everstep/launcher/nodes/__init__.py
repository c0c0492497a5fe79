"""The nodes of one job: what one agent says to the others, and what it hears of them."""
