"""`replay`: run a trace of real prompts through the planner, without bytes."""
