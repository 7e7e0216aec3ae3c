"""How ends of attempts reach the database."""
