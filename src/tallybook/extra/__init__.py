"""What not every program needs: the dashboard, the operator API, providers, ready-made tasks, the demo."""
