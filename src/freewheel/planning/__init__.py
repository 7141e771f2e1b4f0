"""What should I use? Every strategy in virtual time on a stand-in model, ranked by what its steps are worth."""
