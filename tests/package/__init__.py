"""What is published: the wheel and the source archive, built and run as users do."""
