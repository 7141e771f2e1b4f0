"""What should I use? Every strategy in virtual time, ranked by what its steps are worth."""
