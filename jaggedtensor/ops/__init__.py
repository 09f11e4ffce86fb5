"""What the public methods are made of: functions of packed values and a layout, or of plain tensors."""
