-- Removes values. KEYS: the values. Returns the names of their objects.
local gone = {}

for i = 1, #KEYS do drop(KEYS[i], gone) end
return gone
