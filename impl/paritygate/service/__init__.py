"""The proof of a Tinker-compatible service: black-box checks through the real SDK, held to float64 definitions.

    python -m paritygate.service --base-url URL --model NAME

Needs the SDK and NumPy, and nothing else of this project; importing it imports neither.
"""
