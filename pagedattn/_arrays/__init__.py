"""What any array is, of whatever framework: inspected, converted, checked."""
