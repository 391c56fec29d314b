"""Template `mcp-gateway`: a stand-in for E2B's MCP gateway, and the layer that brings it into sandboxes."""
