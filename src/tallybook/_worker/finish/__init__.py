"""How the ends of attempts reach the database."""
