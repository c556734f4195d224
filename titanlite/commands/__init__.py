"""The commands of titanlite. Each one parses its options, calls a public function, and prints."""
